"""The `sqldb` environment: questions and changes in SQL."""
