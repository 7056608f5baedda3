"""What a run is made of on a rank: its stages (`parts`), how they are put together (`building`),
its checkpoints (`saver`), and its metrics, samples and alarms (`recorder`)."""
