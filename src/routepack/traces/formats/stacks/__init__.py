"""One module a stack: ``load`` reads what it records, ``export`` gives it back."""
