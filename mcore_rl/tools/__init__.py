"""Commands before and after a run: plan, doctor, report."""
