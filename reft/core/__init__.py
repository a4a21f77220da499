"""What reft decides, in pure functions and small state machines: no clock, thread, socket, file or torch."""
