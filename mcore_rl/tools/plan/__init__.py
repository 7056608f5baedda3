"""`mcore-rl plan`: memory and traffic of a job before a device is taken; see `mcore_rl.planner`."""
