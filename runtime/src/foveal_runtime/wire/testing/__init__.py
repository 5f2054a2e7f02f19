"""Test doubles of the wire; nothing in the product imports them."""
