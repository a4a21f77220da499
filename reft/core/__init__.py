"""What reft decides: pure functions and state machines. No clock, thread, socket, file or torch."""
