"""What a run is made of on a rank: its stages (`parts`), how they are put together (`building`),
its checkpoints (`saver`), and what ends it early (`early_exit`)."""
