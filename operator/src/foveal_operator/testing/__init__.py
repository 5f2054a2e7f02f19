"""Test doubles of the cluster; nothing in the product imports them."""
