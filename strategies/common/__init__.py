"""The parts that several strategies compose."""
