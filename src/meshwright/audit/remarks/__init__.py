"""The usual accidents of sharded programs, recognised without a plan."""
