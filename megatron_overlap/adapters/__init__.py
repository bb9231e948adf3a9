"""Replacements of methods of Megatron and TransformerEngine. The only code that imports them."""
