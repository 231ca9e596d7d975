"""What every DeepSpeed engine that is served needs, whoever owns it."""
