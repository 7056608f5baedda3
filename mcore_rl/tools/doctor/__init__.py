"""`mcore-rl doctor`: checks of an installation and a command line before a GPU is used.

command             reads the command line and prints the findings
examination         calls all checks of the installation and the machine
job                 calls all checks of a command line; imports Megatron
finding             a finding (area, level, sentence, remedy), and the report that collects them
versions, patches, gpus                            the installation and the devices
ports, space, network                              the machine
flags, checkpoint, plan, prompts, reward           the flags, and the files that they name
"""
