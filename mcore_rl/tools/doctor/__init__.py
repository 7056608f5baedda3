"""`mcore-rl doctor`: an installation and a command line, checked before any GPU is taken.

finding        what a check says: area, level, sentence, remedy
gpus           the devices, asked through NVML, without a CUDA context
versions, patches                       the installation
ports, shared_memory, limits, network   the machine
flags          the command line, by the checks of a start, one fault not hiding the next
checkpoint, plan, space, prompts, reward    what the command line names
examination    all of them; command: from the command line to what is printed
"""
