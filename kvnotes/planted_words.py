"""The vocabulary of the planted models: one word is one token. No torch, so that tasks may import it.

A scenario's three values carry the codes 0, 1, 2 in this order, its actions the signs +1 (permit) and -1
(restrict). Scenarios share no value and no action, so a word alone says what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIALS = (PAD, BOS, EOS, UNK)

IS = "="  # stands once in a prompt, right before the field's value
WHEN = "when"  # between a rule's action and its value
FIRST_NOTE, SECOND_NOTE = "---", "***"  # the delimiters after the rules that may hold a note
FRAME = ("state", "rules", "note", "request", ":", ".", ";", IS, WHEN, FIRST_NOTE, SECOND_NOTE)


@dataclass(frozen=True, kw_only=True)
class PlantedScenario:
    """One gated decision: what the field belongs to, its values, its two actions and what is asked."""

    name: str
    domain: str
    values: tuple[str, str, str]
    permit: str
    restrict: str
    request: str

    @property
    def answer(self) -> str:
        """The word that opens the answer; the decision is the next token."""
        return f"{self.name}:"


def _scenario(domain: str, name: str, values: str, actions: str, request: str) -> PlantedScenario:
    first, second, third = values.split()
    permit, restrict = actions.split("/")
    return PlantedScenario(
        name=name,
        domain=domain,
        values=(first, second, third),
        permit=permit,
        restrict=restrict,
        request=request,
    )


SCENARIOS: tuple[PlantedScenario, ...] = (
    _scenario("orders", "order", "open packed sold", "ship/wait", "the buyer asks for the parcel today"),
    _scenario("accounts", "account", "local remote mixed", "allow/refuse", "the owner asks to change a limit"),
    _scenario("payments", "payment", "card cash wire", "refund/escalate", "the client asks for the money back"),
    _scenario("access", "door", "north south east", "unlock/alarm", "a guest stands outside and rings"),
    _scenario("network", "device", "wired radio fibre", "connect/isolate", "a machine asks to join"),
    _scenario("deployments", "build", "red green blue", "deploy/rollback", "the team asks for the new version"),
    _scenario("inventory", "stock", "fresh frozen dried", "reserve/reorder", "the shop asks for ten boxes"),
    _scenario("clinic", "patient", "adult child infant", "schedule/transfer", "the ward asks for a visit"),
    _scenario("moderation", "post", "text image video", "publish/remove", "the writer asks to go live"),
    _scenario("travel", "ticket", "single return group", "board/deny", "a traveller waits at the gate"),
    _scenario("energy", "grid", "day evening night", "charge/pause", "the car asks for power"),
    _scenario("library", "book", "paper audio digital", "lend/recall", "a reader asks for the next volume"),
)

FILLERS: tuple[str, ...] = (
    "keep a short log of every step",
    "write names in full",
    "round sums to two places",
    "use plain words with the client",
    "thank the sender at the end",
    "save a copy of each file",
    "never share a password",
    "list the oldest item on top",
    "answer in one line",
    "mark the time of each call",
    "send the weekly report to the team",
    "check the spelling of the city",
)


def vocabulary() -> tuple[str, ...]:
    """Every word a planted tokenizer knows, in token id order: the specials, then the rest sorted."""
    words = set(FRAME)
    for scenario in SCENARIOS:
        words |= {scenario.name, scenario.answer, *scenario.values, scenario.permit, scenario.restrict}
        words |= set(scenario.request.split())
    for sentence in FILLERS:
        words |= set(sentence.split())
    return (*SPECIALS, *sorted(words))
