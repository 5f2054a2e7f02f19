"""Test doubles of the engine; nothing in the product imports them."""
