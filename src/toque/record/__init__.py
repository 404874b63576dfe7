"""What an engine did, turn by turn, in a file; and the same again from that file."""
