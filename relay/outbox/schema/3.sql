-- Version 3: what Azure changed about an event is found however much else happened. The index may exist: a flipped bit
-- turns version 3 into 2.

CREATE INDEX IF NOT EXISTS journal_of_change ON journal (event_key, position) WHERE kind >= 'event.' AND kind < 'event/';
