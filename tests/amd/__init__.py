"""What AMD's GPUs would run, looked at and executed on machines that have none."""
