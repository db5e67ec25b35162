"""The kinds of rooms of household tasks: their receptacles and the objects that may be in them."""

from dataclasses import dataclass

from slipstream.envhub.name_list import name_list

OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe", "laundryhamper"})
INSIDE = OPENABLE | {"sinkbasin", "garbagecan", "bathtub"}  # objects are "in" these and "on" all others

LAMP = "desklamp"

CLEANABLE = frozenset(
    name_list(
        """
        apple, bowl, butterknife, cloth, cup, egg, fork, knife, ladle, lettuce, mug, pan, plate, pot, potato,
        soapbar, spatula, spoon, tomato
        """
    )
)
HEATABLE = frozenset(("apple", "bread", "cup", "egg", "mug", "plate", "potato", "tomato"))
COOLABLE = frozenset(
    ("apple", "bowl", "bread", "cup", "egg", "lettuce", "mug", "pan", "plate", "pot", "potato", "tomato", "winebottle")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoomKind:
    receptacles: dict[str, tuple[int, int]]  # kind -> how many (at least, at most)
    objects: tuple[str, ...]
    lamp_places: tuple[str, ...] = ()  # kinds of receptacles that a lamp may be on; empty if the room has no lamp


KITCHEN = RoomKind(
    receptacles={
        "cabinet": (3, 8),
        "drawer": (2, 5),
        "countertop": (1, 3),
        "shelf": (1, 3),
        "diningtable": (1, 1),
        "stoveburner": (2, 4),
        "coffeemachine": (1, 1),
        "garbagecan": (1, 1),
        "sinkbasin": (1, 1),
        "microwave": (1, 1),
        "fridge": (1, 1),
    },
    objects=name_list(
        """
        apple, bread, tomato, potato, lettuce, egg, mug, cup, plate, bowl, pan, pot, knife, butterknife, fork,
        spoon, spatula, ladle, saltshaker, peppershaker, winebottle, vase
        """
    ),
)
BATHROOM = RoomKind(
    receptacles={
        "cabinet": (2, 4),
        "drawer": (1, 3),
        "countertop": (1, 1),
        "toilet": (1, 1),
        "bathtub": (1, 1),
        "handtowelholder": (1, 2),
        "shelf": (0, 2),
        "garbagecan": (1, 1),
        "sinkbasin": (1, 2),
    },
    objects=("soapbar", "cloth", "spraybottle", "soapbottle", "toiletpaper", "candle", "towel", "tissuebox"),
)
BEDROOM = RoomKind(
    receptacles={
        "bed": (1, 1),
        "desk": (1, 2),
        "drawer": (2, 6),
        "shelf": (1, 4),
        "sidetable": (1, 2),
        "dresser": (0, 1),
        "safe": (0, 1),
        "laundryhamper": (1, 1),
        "garbagecan": (1, 1),
    },
    objects=name_list(
        """
        pen, pencil, book, cd, cellphone, laptop, keychain, creditcard, alarmclock, pillow, mug, bowl,
        baseballbat
        """
    ),
    lamp_places=("desk", "sidetable"),
)
LIVING_ROOM = RoomKind(
    receptacles={
        "sofa": (1, 1),
        "armchair": (1, 2),
        "coffeetable": (1, 1),
        "sidetable": (1, 2),
        "drawer": (1, 4),
        "shelf": (1, 3),
        "tvstand": (1, 1),
        "cabinet": (0, 3),
        "garbagecan": (1, 1),
    },
    objects=name_list(
        """
        remotecontrol, newspaper, book, vase, statue, box, keychain, creditcard, watch, pillow, laptop,
        tissuebox, candle
        """
    ),
    lamp_places=("sidetable", "coffeetable"),
)

ROOM_KINDS = (KITCHEN, BATHROOM, BEDROOM, LIVING_ROOM)
