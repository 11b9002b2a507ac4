"""Problems of installed environments, added to the problems that tests judge."""
