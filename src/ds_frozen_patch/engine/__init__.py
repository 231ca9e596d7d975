"""What every patched DeepSpeed engine needs, whoever owns it."""
