"""What a machine with a device is made of: streams, events, copies, pinned memory, and time on one clock."""
