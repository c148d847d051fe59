"""The scenarios of the gated decisions: a field, its values, a permitted action and a restricting one.

Every value is a plain word of one token under the four registry tokenizers, bare after a quote and after a
space. Values are kinds, places and colours rather than verdicts, because which value permits is
counterbalanced: a word that already means yes or no would fight half of the rules that use it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One gated decision. `permit` and `restrict` are single words with different first tokens."""

    id: str
    domain: str
    context: str  # the job, one sentence
    field: str
    values: tuple[str, str, str]
    permit: str  # what a careful agent may do
    restrict: str  # what it must do instead
    request: str  # what is asked of the agent, one sentence

    @property
    def field_words(self) -> str:
        """The field as words of a sentence."""
        return self.field.replace("_", " ")


def _scenario(name: str, field: str, values: str, actions: str, /, *, context: str, request: str) -> Scenario:
    """A scenario from `domain/id`, its field, three values and `permit/restrict`."""
    domain, _, identifier = name.partition("/")
    permit, _, restrict = actions.partition("/")
    first, second, third = values.split()
    return Scenario(
        id=identifier,
        domain=domain,
        context=context,
        field=field,
        values=(first, second, third),
        permit=permit,
        restrict=restrict,
        request=request,
    )


SCENARIOS: tuple[Scenario, ...] = (
    _scenario(
        "orders/order_status", "order_status", "pending paid packed", "cancel/escalate",
        context="You look after orders for an online shop.",
        request="The customer asks you to call off order 4417.",
    ),
    _scenario(
        "orders/sales_channel", "sales_channel", "web store phone", "refund/review",
        context="You look after money matters for a shoe shop.",
        request="The customer wants the 40.00 for order 7093 back.",
    ),
    _scenario(
        "accounts/account_role", "account_role", "admin member editor", "update/lock",
        context="You maintain user accounts for a small company.",
        request="The user asks for a new address on account 218.",
    ),
    _scenario(
        "accounts/plan_type", "plan_type", "basic standard business", "upgrade/hold",
        context="You manage subscriptions for a photo service.",
        request="The subscriber asks for more room on account 530.",
    ),
    _scenario(
        "payments/payment_method", "payment_method", "card cash wire", "charge/review",
        context="You process bills for a repair garage.",
        request="Invoice 3306 over 125.00 is due and the client is at the desk.",
    ),
    _scenario(
        "payments/risk_level", "risk_level", "low medium high", "pay/block",
        context="You handle outgoing payments for a charity.",
        request="A supplier expects 900.00 for invoice 1180.",
    ),
    _scenario(
        "door_access/badge_color", "badge_color", "red blue green", "unlock/deny",
        context="You guard the side entrance of a research institute.",
        request="A person holds a badge to the reader of entrance 12.",
    ),
    _scenario(
        "door_access/wing", "wing", "north south east", "open/close",
        context="You run the gates of a museum.",
        request="A courier is in front of gate 5 with a crate.",
    ),
    _scenario(
        "network_access/network_zone", "network_zone", "office home public", "connect/block",
        context="You watch over the network of a law firm.",
        request="A laptop asks for the shared drive of case 77.",
    ),
    _scenario(
        "network_access/traffic_type", "traffic_type", "audio video text", "forward/drop",
        context="You operate a gateway between two networks.",
        request="A packet for host 10 has arrived at the gateway.",
    ),
    _scenario(
        "deployments/environment", "environment", "test stage production", "deploy/wait",
        context="You ship new versions of a web service.",
        request="The team asks for version 3.2 to go out now.",
    ),
    _scenario(
        "deployments/release_track", "release_track", "alpha beta gamma", "publish/freeze",
        context="You look after the builds of a phone app.",
        request="Build 901 has passed and the team asks what happens to it.",
    ),
    _scenario(
        "inventory/stock_level", "stock_level", "empty half full", "order/skip",
        context="You keep the shelves of a warehouse filled.",
        request="The foreman asks what to do about shelf 31.",
    ),
    _scenario(
        "inventory/material", "material", "paper glass metal", "pick/inspect",
        context="You steer a robot in a depot.",
        request="The robot stands in front of bin 64.",
    ),
    _scenario(
        "clinic_triage/triage_tag", "triage_tag", "yellow orange white", "schedule/transfer",
        context="You sort the patients of a walk-in clinic.",
        request="Patient 52 has arrived at the front desk.",
    ),
    _scenario(
        "clinic_triage/sample_type", "sample_type", "blood skin bone", "accept/repeat",
        context="You receive samples for a hospital laboratory.",
        request="Tube 8841 has come in from ward 3.",
    ),
    _scenario(
        "moderation/post_type", "post_type", "image video text", "approve/remove",
        context="You moderate a forum about gardens.",
        request="Post 6120 is next in the queue.",
    ),
    _scenario(
        "moderation/topic", "topic", "news music art", "publish/flag",
        context="You moderate the comments of a radio station.",
        request="Comment 345 is waiting for a decision.",
    ),
    _scenario(
        "travel/season", "season", "spring summer winter", "book/wait",
        context="You plan trips for a travel agency.",
        request="The traveller asks for two seats on tour 15.",
    ),
    _scenario(
        "travel/vehicle", "vehicle", "van bus train", "board/return",
        context="You help the guests of a tour at the station.",
        request="Guest 27 is on the platform with a ticket.",
    ),
    _scenario(
        "energy/tariff", "tariff", "day night peak", "charge/pause",
        context="You control the battery of a house.",
        request="The battery is at 48 percent and the owner asks what happens next.",
    ),
    _scenario(
        "energy/fuel", "fuel", "gas oil coal", "start/stop",
        context="You operate the burner of a heating plant.",
        request="Burner 2 is ready and the shift leader asks for an action.",
    ),
    _scenario(
        "logistics/parcel_size", "parcel_size", "small medium large", "deliver/return",
        context="You direct the parcels of a courier firm.",
        request="Parcel 7714 has reached the local depot.",
    ),
    _scenario(
        "logistics/lane", "lane", "left right middle", "load/park",
        context="You direct the trucks in a container port.",
        request="Truck 19 has reached the crossing.",
    ),
    _scenario(
        "hotel/room_type", "room_type", "single double suite", "confirm/reject",
        context="You answer the desk of a small hotel.",
        request="The guest asks for two nights under reference 603.",
    ),
    _scenario(
        "staffing/contract", "contract", "daily weekly annual", "approve/forward",
        context="You handle requests of the staff of a bakery.",
        request="Employee 41 asks for three days off in May.",
    ),
    _scenario(
        "farming/soil", "soil", "dry warm cold", "plant/skip",
        context="You look after the fields of a farm.",
        request="The tractor is at the edge of field 8.",
    ),
    _scenario(
        "farming/crop", "crop", "rice corn fruit", "harvest/wait",
        context="You plan the work of a farm cooperative.",
        request="The crew asks what to do on plot 22 today.",
    ),
    _scenario(
        "manufacturing/machine_mode", "machine_mode", "manual auto test", "start/stop",
        context="You supervise a press in a factory.",
        request="Press 4 has a new job on its list.",
    ),
    _scenario(
        "documents/document_state", "document_state", "draft final signed", "send/archive",
        context="You keep the documents of a notary.",
        request="The clerk asks what to do with file 1902.",
    ),
    _scenario(
        "insurance/damage_cause", "damage_cause", "fire water wind", "pay/inspect",
        context="You sort the claims of an insurer.",
        request="Claim 2750 over 600.00 has come in.",
    ),
    _scenario(
        "support/contact_method", "contact_method", "email letter fax", "reply/transfer",
        context="You sort the questions that reach a help desk.",
        request="Question 88 is next in line.",
    ),
    _scenario(
        "education/exam_form", "exam_form", "oral written online", "grade/delay",
        context="You help the exam office of a school.",
        request="The teacher asks about exam 16.",
    ),
    _scenario(
        "property/party", "party", "owner tenant agent", "sign/refer",
        context="You prepare the contracts of a housing office.",
        request="The lease for flat 9 lies on the desk.",
    ),
    _scenario(
        "drones/weather", "weather", "clear dark rain", "launch/ground",
        context="You dispatch the survey drones of a city.",
        request="Drone 6 is on its pad with a full battery.",
    ),
    _scenario(
        "library/item_type", "item_type", "map book film", "lend/keep",
        context="You run the counter of a town library.",
        request="A reader brings item 4030 to the counter.",
    ),
)  # fmt: skip
