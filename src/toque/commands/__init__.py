"""What each `toque` command does. Imported one by one, when the command is given."""
