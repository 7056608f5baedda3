"""`mcore-rl doctor`: checks of an installation and a command line before a GPU is used.

command                    reads the command line and prints the findings
examination                calls all checks of the installation and the machine
job, flags, data, reward   the checks of a start, and what they name; import Megatron
finding                    a finding (area, level, sentence, remedy), and the report of all
installation               versions, patches, GPUs
machine, network           ports, shared memory, limits, disks; variables and devices
"""
