import mcore_rl

mcore_rl.prepare()  # before the first import of Megatron
from functools import partial
from gpt_builders import gpt_builder
from model_provider import model_provider


def extra_args(parser):
    parser.add_argument("--notes", help="a flag of the fork's own")
    return parser


job = mcore_rl.initialize(extra_args)  # checks, derives Megatron's flags, starts Megatron
mcore_rl.run(job, partial(model_provider, gpt_builder))
