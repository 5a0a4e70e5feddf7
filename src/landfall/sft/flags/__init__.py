"""The flags of ``landfall sft``: one class a group, one field a flag, and what is refused by name."""
