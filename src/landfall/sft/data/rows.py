"""What a row of a dataset may look like, and the one form that all become: a conversation.

Understood are ``messages`` (role and content), sharegpt's ``conversations`` (from and value), query and
response (with ``history``), and alpaca's instruction, input and output; each with ``images`` or ``image``
and ``system``. A row that is none of these, or asks for what is not trained here, raises DataError; whose
``what`` is the reason alone, as the row's place is known to the caller.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from landfall.errors import DataError

IMAGE_TAG = "<image>"

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
}
_NOT_TRAINED = ("video", "videos", "audio", "audios", "objects", "tools")
_RESERVED = ("<|image_pad|>", "<|video_pad|>")


@dataclass(frozen=True)
class Message:
    role: str
    """system, user or assistant"""
    content: str
    """each IMAGE_TAG in it is the place of one image"""
    trained: bool
    """whether it is an answer to learn"""


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    images: tuple[str | bytes, ...]
    """Paths as written in the row, or an image file's content; as many as there are IMAGE_TAGs."""


def parse_row(row: Any) -> Conversation:
    """The conversation of a row as it was read. Raises DataError with the reason."""
    if not isinstance(row, dict):
        raise DataError(f"a row must be an object, not {_kind(row)}")
    for name in _NOT_TRAINED:
        if row.get(name):
            raise DataError(f"`{name}` is not supported")
    images = _images_of_row(row)
    inline: list[str | bytes] = []
    messages = [_message(message, inline) for message in _raw_messages(row)]
    if images and inline:
        raise DataError("images are given both beside the messages and inside them")
    _check_turns(messages)
    images = images or inline
    return Conversation(tuple(_with_all_tags(messages, len(images))), tuple(images))


def with_image_paths(row: dict[str, Any], path_of: Callable[[str | bytes], str]) -> dict[str, Any]:
    """A row that ``parse_row`` accepts, each of its images replaced by ``path_of`` it."""

    def moved_message(message: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(message.get("content"), list):
            return message
        images = [_image_of_part(part) for part in message["content"]]
        parts = [
            {"type": "image", "image": path_of(_image(image))} if image else part
            for part, image in zip(message["content"], images, strict=True)
        ]
        return {**message, "content": parts}

    changed = dict(row)
    for name in ("images", "image"):
        if row.get(name):
            changed[name] = [path_of(_image(image)) for image in _image_values(row[name])]
    if isinstance(row.get("messages"), list):
        changed["messages"] = [moved_message(message) for message in row["messages"]]
    return changed


def _raw_messages(row: dict[str, Any]) -> list[Any]:
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for name in ("messages", "conversations", "conversation"):
        if row.get(name) is not None:
            messages = _listed(name, row[name])
            has_system = messages and isinstance(messages[0], dict) and _role(messages[0]) == "system"
            return messages if has_system else system + messages
    if row.get("response") is not None:
        question, answer = row.get("query"), row["response"]
    elif row.get("output") is not None:
        question, answer = _alpaca_question(row), row["output"]
    else:
        raise DataError(
            "neither messages, conversations, query and response, nor instruction and output; "
            f"the row has {', '.join(map(str, row)) or 'nothing'}"
        )
    turns = [*_history(row), (question or "", answer)]
    roles = ("user", "assistant")
    return system + [{"role": r, "content": c} for turn in turns for r, c in zip(roles, turn, strict=True)]


def _alpaca_question(row: dict[str, Any]) -> str:
    parts = [row[name] for name in ("instruction", "input") if row.get(name)]
    if not all(isinstance(part, str) for part in parts):
        raise DataError("`instruction` and `input` must be text")
    return "\n".join(parts)


def _history(row: dict[str, Any]) -> list[Any]:
    turns = _listed("history", row.get("history") or [])
    if any(not isinstance(turn, list) or len(turn) != 2 for turn in turns):
        raise DataError("`history` must be a list of [query, response]")
    return turns


def _message(message: Any, inline: list[str | bytes]) -> Message:
    """One message; images given inside its content are appended to ``inline``."""
    if not isinstance(message, dict):
        raise DataError(f"a message must be an object, not {_kind(message)}")
    name = _role(message)
    if name not in _ROLES:
        raise DataError(f"unknown role {name!r}; roles are system, user and assistant")
    if message.get("loss_scale") is not None or message.get("tool_calls"):
        raise DataError("`loss_scale` and `tool_calls` in a message are not supported")
    content = message["content"] if "content" in message else message.get("value")
    if isinstance(content, list):
        content = "".join(_content_part(part, inline) for part in content)
    if not isinstance(content, str):
        raise DataError(f"the content of a message must be text, not {_kind(content)}")
    for token in _RESERVED:
        if token in content:
            raise DataError(f"{token} is written in a message; mark the place of an image with {IMAGE_TAG}")
    role, loss = _ROLES[name], message.get("loss")
    if loss not in (None, True, False):
        raise DataError(f"`loss` must be true or false, not {loss!r}")
    return Message(role, content, trained=role == "assistant" and loss in (None, True))


def _role(message: dict[str, Any]) -> Any:
    role = message["role"] if "role" in message else message.get("from")
    return role if isinstance(role, str) else str(role)


def _content_part(part: Any, inline: list[str | bytes]) -> str:
    """A part of a message's content as OpenAI writes it: text, image or image_url."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind not in ("image", "image_url"):
        raise DataError(
            f"a part of a message's content is neither text nor image: {_kind(part)} {kind or ''}"
        )
    image = _image_of_part(part)
    inline += [_image(image)] if image else []
    return IMAGE_TAG


def _image_of_part(part: dict[str, Any]) -> Any:
    value = part.get("image") or part.get("image_url")
    return value["url"] if isinstance(value, dict) and "url" in value else value


def _images_of_row(row: dict[str, Any]) -> list[str | bytes]:
    given = [row[name] for name in ("images", "image") if row.get(name)]
    if len(given) == 2:
        raise DataError("both `image` and `images` are given")
    return [_image(image) for value in given for image in _image_values(value)]


def _image_values(value: Any) -> list[Any]:
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        return _listed("images", value)
    return value if isinstance(value, list) else [value]


def _image(value: Any) -> str | bytes:
    """A path, or the content of an image file (of a table, or base64 as a data URI)."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return base64.b64decode(value.partition("base64,")[2], validate=True)
        except binascii.Error as error:
            raise DataError(f"an image is no valid base64: {error}") from None
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise DataError(f"images are not fetched from the network; save {value} as a file")
    if not isinstance(value, str | bytes) or not value:
        raise DataError(f"an image must be a path, not {_kind(value)}")
    return value


def _listed(name: str, value: Any) -> list[Any]:
    """``value`` if it is a list, or the list that it is as JSON text (as in a csv file)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise DataError(f"`{name}` must be a list, not text") from None
    if not isinstance(value, list):
        raise DataError(f"`{name}` must be a list, not {_kind(value)}")
    return value


def _check_turns(messages: list[Message]) -> None:
    if not messages:
        raise DataError("there are no messages")
    if any(message.role == "system" for message in messages[1:]):
        raise DataError("a system message that is not the first")
    if messages[-1].role != "assistant":
        raise DataError("there is no answer: the last message is not the assistant's")
    if not any(message.trained for message in messages):
        raise DataError("there is nothing to train on: every answer has loss false")


def _with_all_tags(messages: list[Message], num_images: int) -> list[Message]:
    """``messages`` with tags for the images that have none put before the first user message."""
    num_missing = num_images - sum(message.content.count(IMAGE_TAG) for message in messages)
    if num_missing < 0:
        raise DataError(f"{num_images - num_missing} {IMAGE_TAG} tags for {num_images} images")
    if num_missing == 0:
        return messages
    for index, message in enumerate(messages):
        if message.role == "user":
            tagged = replace(message, content=IMAGE_TAG * num_missing + message.content)
            return messages[:index] + [tagged] + messages[index + 1 :]
    raise DataError("there are images, but no user message to put them in")


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
