"""`mcore-rl doctor`: checks of an installation and a command line before a GPU is used.

finding             result of a check: area, level, sentence, remedy
gpus                the devices, queried through NVML, without a CUDA context
versions, patches   the installation
network, space      the machine: network and ports; disks, memory, /dev/shm and limits
flags               the command line, by the checks of a start, without stopping at the first fault
checkpoint, plan, prompts, reward    the files and settings that the command line names
examination         runs all checks; command: reads the command line and prints the findings
"""
