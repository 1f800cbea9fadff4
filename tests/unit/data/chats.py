"""Chat templates in the manner of real ones, and conversations, that tests of formats share."""

from __future__ import annotations

import random
from typing import Any

from tests.unit.data.samples import random_text

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Like SmolLM2's: a system message of its own, no begin-of-text token."""

MARKED = (
    "{{ bos_token }}\n{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "{{- '<|im_start|>assistant\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}\n"
    "    {%- else %}\n        {{- '<|im_start|>' + message.role + '\n' + message.content | trim }}\n"
    "        {{- '<|im_end|>\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""With generation marks and white space control."""

THINKING = (
    "{%- set ns = namespace(last=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' %}"
    "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{%- endif %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Like Qwen3's: what an answer looks like depends on what follows it."""

PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'Q: ' + m.content + '\n' }}"
    "{% else %}{{ 'A: ' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
"""Without a special token anywhere."""


def conversation(rng: random.Random, turns: int, system: bool = False) -> list[dict[str, Any]]:
    """Turns of user and assistant, in alternation; answers are never only white space."""
    messages = [{"role": "system", "content": random_text(rng, 4)}] * system
    for _ in range(turns):
        messages.append({"role": "user", "content": random_text(rng, rng.randrange(1, 9))})
        messages.append({"role": "assistant", "content": f"mule{random_text(rng, rng.randrange(0, 9))}"})
    return messages
