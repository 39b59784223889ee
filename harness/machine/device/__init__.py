"""A machine with a device is made of these parts: streams, events, copies, pinned memory, and time on one clock."""
