"""The demos: the stock example with failures and killed processes, on Spark or with plain workers; both check the
result.
"""
