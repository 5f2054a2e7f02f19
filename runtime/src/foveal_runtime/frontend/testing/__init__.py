"""Test doubles of the frontend; nothing in the product imports them."""
