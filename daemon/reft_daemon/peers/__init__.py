"""The other daemons of a job: the channels to them, and the round between daemons."""
