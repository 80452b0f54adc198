"""What both sides of the bar share: values, errors, the command line, commands, the store, the record, the engine."""
