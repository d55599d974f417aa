"""What will happen in a run, as plain data: partition, schedule, messages and transport."""
