"""The commands around a run: plan, doctor, report."""
