"""`mcore-rl plan`: memory and traffic of a job before a device is used; see `mcore_rl.planner`."""
