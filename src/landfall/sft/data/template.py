"""ChatML: a conversation as tokens, and which of them are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from landfall.errors import DataError
from landfall.sft.data.processor import IMAGE, Processor
from landfall.sft.data.rows import IMAGE_TAG, Conversation, Message


@dataclass(frozen=True)
class Encoded:
    """Tokens of a row with a single pad for each image."""

    input_ids: list[int]
    trained: list[bool]
    """Whether the token is a target."""


def encode(conversation: Conversation, processor: Processor) -> Encoded:
    """For each message ``<|im_start|>role``, newline, content, ``<|im_end|>``; newlines between messages.

    Trained are the answers with their ``<|im_end|>``, images in them excepted. An answer is tokenized apart
    from what precedes it, because that is what the model sees when it has to write it. This equals the
    tokens of the whole text, except where an answer starts with line breaks.
    """
    input_ids: list[int] = []
    trained: list[bool] = []
    for is_trained, pieces in groupby(_pieces(conversation.messages), key=lambda piece: piece[1]):
        tokens = processor.encode("".join(text for text, _ in pieces))
        input_ids += tokens
        trained += [is_trained] * len(tokens)
    if input_ids.count(processor.image_token_id) != len(conversation.images):
        raise DataError("the tokenizer merges image tokens with the text around them")
    return Encoded(input_ids, trained)


def _pieces(messages: tuple[Message, ...]) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it is trained on."""
    pieces: list[tuple[str, bool]] = []
    for message in messages:
        pieces.append((f"<|im_start|>{message.role}\n", False))
        first, *others = message.content.split(IMAGE_TAG)
        pieces.append((first, message.trained))
        for text in others:
            pieces += [(IMAGE, False), (text, message.trained)]
        pieces += [("<|im_end|>", message.trained), ("\n", False)]
    return [piece for piece in pieces[:-1] if piece[0]]
