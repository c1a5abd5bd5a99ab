"""Every message of the fleet: frozen dataclasses, encoded by `kvproto.codec` alone. Pure, no dicts past the codec.

Fields are only ever added, with a default; unknown ones are ignored by older readers. `Annotated` bounds are checked
when a message is read and the error names the field.

    producer ──ProducerRequest──▶ placement ──GenerateRequest──▶ worker ──frames──▶ the producer's inbox
    Client ──PlaceRequest──▶ placement ──Placement──▶ Client ──GenerateRequest──▶ worker ──frames──▶ Client
"""

from __future__ import annotations

from kvproto.messages.admin import *  # noqa: F403
from kvproto.messages.batches import *  # noqa: F403
from kvproto.messages.between_ingresses import *  # noqa: F403
from kvproto.messages.chats import *  # noqa: F403
from kvproto.messages.frames import *  # noqa: F403
from kvproto.messages.members import *  # noqa: F403
from kvproto.messages.placement import *  # noqa: F403
from kvproto.messages.requests import *  # noqa: F403
from kvproto.messages.vocabulary import *  # noqa: F403
