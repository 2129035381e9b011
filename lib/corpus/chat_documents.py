"""Convert documents to the rows of a chat dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from lib.core.conversation import Conversation, InvalidConversation, Place
from lib.corpus import chat_rows, conversations, json_data
from lib.corpus.chat_rows import ChatPartWriter
from lib.corpus.documents import DROPPED, SKIPPED, SKIPPED_FILE, Documents, RowFiles
from lib.corpus.row_options import RowOptions


class ChatDocuments(Documents):
    """Writes one row per conversation."""

    as_data = True

    def __init__(
        self,
        row_options: RowOptions,
        parts: Mapping[str, ChatPartWriter],
        errors: BinaryIO,
        dropped: BinaryIO,
        row_files: Mapping[str, RowFiles],
    ) -> None:
        super().__init__(row_options, parts, errors, dropped, row_files)
        self._parts = parts
        self._format = ""  # format of the current file's last record

    def begin(self, path: str, source: str, role: str = "") -> None:
        """Start a file."""
        super().begin(path, source, role)
        self._format = ""

    def is_column_wanted(self, name: str) -> bool:
        """Return whether a column of a table decides what is trained."""
        return conversations.is_wanted(name)

    def note_unread(self, name: str, count: int) -> None:
        """Count the rows of a column that is not read."""
        self.tally.chat.note_unused([f"record: {name}"], count)

    def add_text(self, data: bytes) -> None:
        """Report a plain-text file as skipped: it contains no conversation."""
        self._note_other("plain text", SKIPPED_FILE, 0, 1)

    def add_large_text(self, text: BinaryIO, size: int, characters: int, sha256: bytes) -> None:
        """Report a large plain-text file as skipped."""
        self.add_text(b"")

    def add_values(self, values: Sequence[Any]) -> bool:
        """Return False, so that the caller passes each record and its position to `add_value`."""
        return False

    def add_value(
        self, value: Any, offset: int | None = None, line: int | None = None, number: int = 0
    ) -> None:
        """Add a conversation, or report why the record is not one."""
        line = line or number or None
        if not (name := conversations.detect_format(value)):
            self._note_other(conversations.describe_record(value), SKIPPED, offset, line)
            return
        if name != self._format:
            self._format = name
            self.tally.chat.note_format(self._path, name, line)
        try:
            chat = conversations.parse_record(value, name)
            self._take(chat, Place(self._source, line, offset))
            self.tally.chat.note_unused(conversations.list_unused_keys(value, name))
        except InvalidConversation as refusal:
            self.note(refusal.kind, str(refusal), DROPPED, offset, line)
        except (json_data.UnwritableValue, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
            self.note(
                "content",
                f"a tool or a tool call cannot be stored: {reason}",
                DROPPED,
                offset,
                line,
            )

    def finish(self) -> None:
        """Finish the parts and add their counts to the tally."""
        super().finish()
        for part in self._parts.values():
            self.tally.chat.counts.add(part.counts)

    def _note_other(
        self, description: str, action: str, offset: int | None, line: int | None
    ) -> None:
        self.tally.chat.note_other(self._path, line, description)
        self.note(
            "no conversation", f"expected a conversation, found {description}", action, offset, line
        )

    def _take(self, chat: Conversation, place: Place) -> None:
        """Add a row for a conversation; lone surrogates in its text are replaced."""
        try:
            self._add_row(chat, place)
        except UnicodeEncodeError:
            (messages, tools, kwargs), replaced = json_data.repair_strings(
                [chat.messages, chat.tools, chat.template_kwargs]
            )
            self._add_row(Conversation(messages, tools, chat.weights, kwargs), place)
            self.tally.replaced += replaced

    def _add_row(self, chat: Conversation, place: Place) -> None:
        """Add a row. Raises the errors of chat_rows.encode_chat before anything is added."""
        encoded = chat_rows.encode_chat(chat)
        digest = _hash_content(chat) if self._hashes else b""
        self.tally.documents += 1
        if self._take_row(sum(len(message["content"]) for message in chat.messages)):
            split = self._split_of(digest)
            self._parts[split].add(chat, place, encoded)
            self._note_row(split, digest)


def _hash_content(chat: Conversation) -> bytes:
    """Return the SHA-256 of the turns, the tools and the variables of a conversation."""
    content: list[Any] = [chat.messages, chat.tools]
    if chat.template_kwargs:
        content.append(chat.template_kwargs)
    return hashlib.sha256(json_data.dump_json(content, is_sorted=True)).digest()
