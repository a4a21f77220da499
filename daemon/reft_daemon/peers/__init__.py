"""The other daemons of a job: channels, and the round between them."""
