"""`kvfleet bench`: load as clients make it, against any server of OpenAI's form, and what it saw of the answers.

Requests are planned from a seed before anything is sent; figures are computed from records after the last answer.
"""
