"""Options of a teacher: another policy whose distribution the actor learns."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.common.parameters import Parameters, degree, param

TOKEN, TOP_K, FULL = "token", "topk", "full"


@dataclass(frozen=True, slots=True)
class TeacherPlace:
    """A teacher of a run: a folder or a server.

    Example: `TeacherPlace("http://host:8000", "--rl-teacher")`.
    """

    place: str
    flag: str  # what names it, in messages

    @property
    def url(self) -> str | None:
        """The address of the server; None for a folder."""
        return self.place if self.place.startswith(("http://", "https://")) else None

    @property
    def folder(self) -> str | None:
        """The folder; None for a server."""
        return None if self.url else self.place

    @property
    def shown(self) -> str:
        """The flag with its value."""
        return f"{self.flag} {self.place}"


@dataclass(frozen=True, slots=True)
class TeacherOptions(Parameters):
    """The flags of a teacher (docs/using/teacher.md)."""

    teacher: str | None = param(
        None,
        "Hugging Face folder, or address of a vLLM server, of a policy to learn from; a source of "
        "prompts may have another one (docs/using/teacher.md)",
    )
    teacher_coef: float = param(1.0, "weight of the reverse KL to --rl-teacher", above=0)
    teacher_form: str = param(
        "token",
        "what is learned of a teacher: token: its log-prob of each sampled token, as part of the "
        "advantage; topk: its --rl-teacher-top-k most probable tokens, as a term of the loss; "
        "full: all tokens, as a term of the loss",
        choices=(TOKEN, TOP_K, FULL),
    )
    teacher_top_k: int = param(64, "tokens of --rl-teacher-form topk", least=1)
    teacher_tp_size: int | None = degree("TP", "teacher")
    teacher_pp_size: int | None = degree("PP", "teacher")
    teacher_ep_size: int | None = degree("EP", "teacher")
    teacher_ranks: str | None = param(
        None, "ranks that only run the teacher, for example 6-7; default: the actor's, in turn"
    )
    teacher_header_env: str | None = param(
        None, "environment variable with a header for the server of --rl-teacher, 'Name: value'"
    )
    teacher_wait_minutes: float = param(
        10.0,
        "how long a run repeats failed requests to the server of --rl-teacher; it then saves and "
        "stops",
        least=0,
    )

    @property
    def num_top_tokens(self) -> int:
        """The most probable tokens that are learned from; 0 in other forms."""
        return self.teacher_top_k if self.teacher_form == TOP_K else 0

    @property
    def with_hidden(self) -> bool:
        """Whether the teacher's hidden states are needed, which give its whole distribution."""
        return self.teacher_form == FULL

    def given(self) -> dict[str, object]:
        """Return the flags that depend on a teacher and are not at their defaults, as typed."""
        default = TeacherOptions()
        return {
            f"--rl-{name.replace('_', '-')}": getattr(self, name)
            for name in self.__slots__
            if name != "teacher" and getattr(self, name) != getattr(default, name)
        }
