"""What several ranks hold alike: shared, compared and put together again."""
