"""Who a caller is: API keys, OIDC tokens, tenants, and the files that hold keys."""
