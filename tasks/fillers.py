"""Neutral filler rules: house style that no decision depends on, and no word of any scenario."""

from __future__ import annotations

import random

FILLERS: tuple[str, ...] = (
    "Address people by the name they give and spell it the way they do.",
    "Use plain words and avoid the jargon of the trade.",
    "Answer in the language in which the question was asked.",
    "Never promise a date that nobody has confirmed with you.",
    "Write amounts with two decimals and name the currency.",
    "Give times on the 24-hour clock and mention the time zone.",
    "Thank people for their patience when an answer took a while.",
    "Do not make jokes about names, accents or places.",
    "Mention the case number in the first line of every message.",
    "Put lists of more than three points into bullets.",
    "Leave out attachments that nobody has asked for.",
    "Spell out abbreviations the first time they appear.",
    "Speak of colleagues by their function, not by their first name.",
    "Log the length of each conversation in whole minutes.",
    "Do not speculate about the causes of a disturbance.",
    "Offer a short summary when a conversation has grown long.",
    "Use the metric system and add other units on demand.",
    "Read numbers back in groups of three digits.",
    "Apologise once and then move on to the matter itself.",
    "Never copy private notes into a message that leaves the building.",
    "Name the department that someone will hear from next.",
    "Prefer the active voice in everything you write.",
    "Check the spelling of street names against the register.",
    "Do not comment on the prices of competitors.",
    "Quote rules by their number and not from memory.",
    "Stay friendly even if the other person does not.",
    "Ask one question at a time and listen to the answer.",
    "Mark every estimate as an estimate.",
    "Avoid exclamation marks and words in capitals.",
    "Say so when you do not know something.",
    "Use the house template for longer letters.",
    "Do not discuss sports, religion or politics.",
    "Round percentages to whole numbers in summaries.",
    "Name the source of every figure you mention.",
    "Speak of people and not of cases when they can hear you.",
    "Number the pages of anything longer than one sheet.",
    "Do not use nicknames for products or places.",
    "State the main point again at the end of a long message.",
    "Leave two blank lines between separate subjects.",
    "Write dates with the month as a word.",
    "Prefer short sentences to long ones.",
    "Never guess the gender of the person who is writing.",
    "Explain a mistake in one sentence, without excuses.",
    "Use the same term for the same thing throughout.",
    "Do not address two people in one message.",
    "Offer a call back if the line is poor.",
    "File notes under the case number, never under a name.",
    "Do not quote from earlier conversations unless asked.",
    "Describe what you did in the past tense.",
    "Wish people a pleasant afternoon when you part.",
    "Avoid idioms that do not translate well.",
    "Give links without shortening and check that they work.",
    "Say who is responsible before you say what is planned.",
    "Leave humour out of letters.",
    "Write dialling numbers with the country code.",
    "Describe locations by street and number.",
    "Never mention the workload of the team.",
    "Mention opening hours only when somebody asks for them.",
    "Use no more than one emphasis in a paragraph.",
    "List the participants of a conversation in alphabetical sequence.",
    "Prefer figures to words for numbers above twelve.",
    "Do not interrupt a person who is dictating a number.",
    "Put the most important sentence at the top.",
    "Leave the choice of greeting to the style sheet.",
    "Avoid two negatives in one instruction.",
    "Explain every step before you ask for patience.",
    "Record the language of the conversation in the log.",
    "Do not shorten names of towns.",
    "Use a neutral subject line for every message.",
    "Never assume that someone has read an earlier message.",
    "Add a glossary if more than five technical terms occur.",
    "Remember that screens differ in size and avoid wide tables.",
    "Let people finish their sentence before you answer.",
    "Give the reason for a question if it sounds personal.",
    "Write in the present tense where you can.",
    "Avoid brackets within brackets.",
    "Use British spelling in letters to institutions.",
    "Do not rate the performance of a colleague.",
    "Count waiting time from the first message.",
    "End every log entry with your initials.",
    "Mention holidays of the region when they affect a visit.",
    "Prefer one long call to several short ones.",
    "Describe pictures in words for those who cannot see them.",
    "Leave margins wide enough for notes by hand.",
)


def fillers(count: int, *, seed: int | str) -> tuple[str, ...]:
    """`count` filler rules, all different: a seeded sample, and past their number the same rules by desk.

    The first `n` of a longer draw with the same seed are the draw of length `n`.
    """
    order = list(FILLERS)
    random.Random(seed).shuffle(order)
    rounds = range(-(-count // len(order)))
    return tuple(_variant(rule, desk) for desk in rounds for rule in order)[:count]


def _variant(rule: str, desk: int) -> str:
    """The rule itself, or the same rule for a numbered desk."""
    return rule if desk == 0 else f"At desk {desk}: {rule[0].lower()}{rule[1:]}"
