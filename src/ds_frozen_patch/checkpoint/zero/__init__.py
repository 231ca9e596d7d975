"""How DeepSpeed lays out a checkpoint: its files, the states in them, ZeRO's partitions."""
