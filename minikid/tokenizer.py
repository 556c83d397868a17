"""Text to token ids and back, on the `tokenizers` library; chat prompts through the model's own template."""

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minikid.config import Config, read_json


class Tokenizer:
    """`tokenizer.json` of an HF-layout folder.

    Text is always plain text here: "<|im_end|>" in a prompt or a passage is encoded letter by letter, and no token is
    added at either end. Control tokens come from the chat template and from `bos_id` alone.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        template: str | None = None,
    ):
        self._library = library
        self._library.encode_special_tokens = True
        self._library.post_processor = None  # it would add control tokens, or hide blanks from the tokens' offsets
        self.special = {t.content: i for i, t in library.get_added_tokens_decoder().items() if t.special}
        self.eos_ids, self.bos_id, self.template = tuple(eos_ids), bos_id, template

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json (chat template, bos) and the eos ids.

        ValueError names the file that is missing or bad.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{path} does not exist; save the tokenizer in the fast format (one tokenizer.json)")
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is no tokenizer of the `tokenizers` library: {error}") from None
        settings = folder / "tokenizer_config.json"
        extra = read_json(settings) if settings.exists() else {}
        template = extra.get("chat_template")
        jinja = folder / "chat_template.jinja"
        if jinja.exists():
            template = jinja.read_text(encoding="utf-8")
        if isinstance(template, list):  # several named templates
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        bos = extra.get("bos_token") if extra.get("add_bos_token", _adds_bos(library, extra)) else None
        bos = bos.get("content") if isinstance(bos, Mapping) else bos
        return cls(library, Config.from_folder(folder).eos_ids, library.token_to_id(bos) if bos else None, template)

    @property
    def vocab_size(self) -> int:
        return self._library.get_vocab_size()

    @property
    def separator(self) -> int | None:
        """[SEP], or else the first control token that is not eos, if there is one; no text is encoded to either."""
        control = sorted(self.special.items(), key=lambda item: (item[0] != "[SEP]", item[1]))
        return next((token for _, token in control if token not in self.eos_ids), None)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that tell this tokenizer from others, kept with what is made of its ids."""
        return hashlib.sha256(self._library.to_str().encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; nothing in it is a control token and none is added.

        ValueError for half a surrogate pair, as which Python reads bytes that are not UTF-8.
        """
        try:
            return self._library.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise ValueError(f"expected Unicode text, came {text!r:.60}; is it in another encoding?") from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; control tokens are left out, incomplete UTF-8 shows as U+FFFD."""
        return self._library.decode(list(ids), skip_special_tokens=True)

    def read_on(self, ids: Sequence[int], place: tuple[int, int]) -> tuple[str, tuple[int, int]]:
        """The text that `ids` add behind `place`, and the new place; (0, 0) is the beginning.

        "" as long as the last character is incomplete: an emoji may span several tokens. `place` is (context, end):
        text up to token `end` is out, and tokens from `context` on are decoded again, since some tokenizers drop a
        leading space; hence the place stays where the tokens add no text.
        """
        context, end = place
        before, text = self.decode(ids[context:end]), self.decode(ids[context:])
        if text.endswith("\ufffd") or text == before:
            return "", place
        return text[len(before) :], (end, len(ids))

    def prompt(self, text: str, chat: bool | None = None, system: str | None = None) -> list[int]:
        """Ids that the model should continue:

        the text after bos (if the model uses one), or one user turn of the chat template; `chat` None: of the
        template if there is one.
        """
        return self._ids(self._prompt_pieces(text, chat, system))

    def example(self, prompt: str, completion: str | Sequence[str], chat: bool | None) -> tuple[list[int], int]:
        """Ids of a prompt, wrapped as by `prompt`, with its completion and an eos token, and the place of the first
        token that has anything of the completion.

        The text before the join and the completion are encoded as one text, so a token may span the join; it belongs
        to the completion. A list of texts becomes fields as in the keys of a trie: each encoded alone, with the
        separator between two. ValueError for a tokenizer without the eos or the separator that it takes.
        """
        if not self.eos_ids:
            raise ValueError("this model names no eos token that could end a completion; give it one in config.json")
        if not isinstance(completion, str):
            if self.separator is None and len(completion) > 1:
                raise ValueError("this tokenizer has no control token beside eos to stand between fields")
            fields = [piece for field in completion for piece in (self.separator, field)][1:]
            ids = self.prompt(prompt, chat)
            return [*ids, *self._ids(fields), self.eos_ids[0]], len(ids)
        *head, last = self._prompt_pieces(prompt, chat)
        head, last = (head, last) if isinstance(last, str) else ([*head, last], "")
        joined = self._library.encode(last + completion, add_special_tokens=False)
        ids = self._ids(head)
        first = sum(end <= len(last) for _, end in joined.offsets)
        return [*ids, *joined.ids, self.eos_ids[0]], len(ids) + first

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation in the model's chat template, ready for the assistant's turn.

        The template decides on control tokens; message contents are encoded as plain text. ValueError without a
        template, or when the template refuses the messages.
        """
        return self._ids(self._chat_pieces(messages))

    def _ids(self, pieces: Iterable[str | int]) -> list[int]:
        return [i for piece in pieces for i in ([piece] if isinstance(piece, int) else self.encode(piece))]

    def _prompt_pieces(self, text: str, chat: bool | None, system: str | None = None) -> list[str | int]:
        """Control tokens, and the texts between them."""
        if not (self.template is not None if chat is None else chat):
            return ([] if self.bos_id is None else [self.bos_id]) + [text]
        messages = [{"role": "system", "content": system}] if system else []
        return self._chat_pieces([*messages, {"role": "user", "content": text}])

    def _chat_pieces(self, messages: Sequence[Mapping[str, str]]) -> list[str | int]:
        if self.template is None:
            raise ValueError("this model has no chat template; use plain completion (--no-chat)")
        marks = [
            f"\x00{uuid.uuid4().hex}\x00" for _ in messages
        ]  # stand-ins, so that contents are never parsed for control tokens
        held = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        names = {i: t for t, i in self.special.items()}
        control = {
            "bos_token": names.get(self.bos_id, ""),
            "eos_token": names.get(self.eos_ids[0], "") if self.eos_ids else "",
        }
        try:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _refuse
            rendered = environment.from_string(self.template).render(
                messages=held, add_generation_prompt=True, **control
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        pieces = _split(rendered, self.special)
        return [piece if isinstance(piece, int) else _fill(piece, marks, messages) for piece in pieces]


def _split(text: str, special: Mapping[str, int]) -> list[str | int]:
    """Cut a rendered template at its control tokens, longest name first."""
    pieces: list[str | int] = [text]
    for name in sorted(special, key=len, reverse=True):
        cut: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                cut.append(piece)
                continue
            first, *rest = piece.split(name)
            cut.append(first)
            for part in rest:
                cut += [special[name], part]
        pieces = [piece for piece in cut if piece != ""]
    return pieces


def _adds_bos(library: tokenizers.Tokenizer, settings: Mapping) -> bool:
    """Whether the tokenizer itself puts bos in front of a text, where the settings do not say."""
    bos = settings.get("bos_token")
    bos = bos.get("content") if isinstance(bos, Mapping) else bos
    return bos is not None and library.encode("a").ids[:1] == [library.token_to_id(bos)]


def _fill(text: str, marks: Sequence[str], messages: Sequence[Mapping[str, str]]) -> str:
    for mark, message in zip(marks, messages, strict=True):
        text = text.replace(mark, message["content"])
    return text


def _refuse(message: str) -> None:
    raise TemplateError(message)
