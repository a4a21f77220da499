"""What reft decides: pure functions and state machines, without clock, thread, socket, file or torch."""
