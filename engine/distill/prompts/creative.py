# ruff: noqa: E501 (one template a line)
"""Owns the prompts for stories, poems, letters and scenes."""

from __future__ import annotations

from random import Random

from engine.distill.prompts.grammar import fill

TEMPLATES = (
    "Write a @tone@ poem about @thing@.",
    "Write a poem about @thing@ that @quirk@.",
    "Write a poem in @count@ stanzas about @thing@ and @thing.2@.",
    "Write a rhyming poem for children about @creature@ that @quirk@.",
    "Compose a sonnet about @thing@ in @place@.",
    "Write a haiku about @thing@.",
    "Write a limerick about @character@ from @place@.",
    "Write a ballad about @character@ who @deed@.",
    "Write a free verse poem about @feeling@ and @thing@.",
    "Write a song with a chorus about @feeling@ in @place@.",
    "Write a bedtime song for @creature@ that @quirk@.",
    "Write a nursery rhyme about @creature@ and @thing@.",
    "Start a story that takes place in @place@ at @time@.",
    "Write the first paragraph of a @genre@ novel set in @place@.",
    "Write the last page of a @genre@ story about @character@ who @deed@.",
    "Tell a @tone@ tale about @character@ and @creature@.",
    "Tell a story about @character@ and @character.2@ who meet in @place@.",
    "Tell me a bedtime story about @creature@ that @quirk@.",
    "Tell a fairy tale about @thing@ that @quirk@.",
    "Write a fable about @creature@ and @creature.2@ with a moral about @feeling@.",
    "Write a very short story in which @character@ finds @thing@.",
    "Write a story of about @80..200@ words about @thing@ in @place@.",
    "Write a ghost story set in @place@.",
    "Write a letter from @character@ to their younger self about @feeling@.",
    "Write a farewell letter from @creature@ to @place@.",
    "Write a love letter from @character@ to @thing@.",
    "Write a postcard from @character@, who is staying in @place@.",
    "Write a diary entry of @character@ after @event@.",
    "Write the diary of @creature@ during @event@.",
    "Write a dialogue between @thing@ and @thing.2@ about @feeling@.",
    "Write a conversation between @character@ and @creature@ in @place@.",
    "Write a short play scene in which @character@ argues with @character.2@ about @thing@.",
    "Write a monologue by @character@ on the day of @event@.",
    "Describe @event@ from the point of view of @creature@.",
    "Describe the smell, sound and light of @place@ at @time@.",
    "Describe a festival of @thing@ in @place@.",
    "Invent a legend that explains why @creature@ @quirk@.",
    "Invent a holiday about @feeling@ and describe how @place@ celebrates it.",
    "Write a toast for @character@ at @event@.",
    "Write a speech by @character@ about @feeling@.",
    "Write a riddle about @thing@ and give the answer.",
    "Write a newspaper article about @event@ in @place@.",
    "Write an advertisement for @thing@ in a @tone@ voice.",
    "Write a travel guide entry for @place@.",
    "Write a menu for a restaurant run by @creature@.",
    "Write the lyrics of a sea shanty about @character@ and @thing@.",
    "Write a @genre@ story in which @event@ changes the life of @character@.",
    "Continue this story: \"When @character@ opened the door, @thing@ was already there.\"",
    "Continue this story: \"Nobody in @place@ remembered @event@, except for @character@.\"",
    "Continue the story: \"It was @time@, and @creature@ had not come home.\"",
    "Write a story that begins with the words \"@character@ had never seen @thing@ before\".",
    "Write a prayer of @character@ before @event@.",
    "Write a thank-you letter from @place@ to the people who saved it from @event@.",
    "Write a children's story about @creature@ who is afraid of @thing@.",
    "Write a comic monologue of @thing@ about its life in @place@.",
    "Write an epilogue for a story about @character@ who @deed@.",
)  # fmt: skip

SLOTS = {
    "tone": ["funny", "sad", "gentle", "dark", "hopeful", "playful", "solemn", "nostalgic", "mysterious", "warm", "dramatic", "whimsical"],
    "genre": [
        "mystery", "science fiction", "fantasy", "detective", "historical", "romance", "horror", "adventure",
        "western", "spy", "magical realist", "crime",
    ],
    "count": ["two", "three", "four", "five", "six"],
    "thing": [
        "an old violin", "a broken compass", "the autumn wind", "a paper boat", "a forgotten key", "the last tram",
        "a rusty bicycle", "the first spring rain", "a glass of water", "an empty theatre", "a lost glove",
        "the northern lights", "a grandfather's watch", "a river that runs backwards", "a silver mirror",
        "the moon over the harbour", "a box of letters", "a wooden bridge", "the smell of bread", "a hot air balloon",
        "a stone wall", "an old map", "a candle in a window", "the sound of a piano", "a garden of cacti",
        "a suitcase full of stars", "the shadow of a tree", "a talking teapot", "a ship in a bottle",
        "a red umbrella", "the dust on a bookshelf", "a clock without hands", "a mountain path", "a field of poppies",
        "a snow globe", "the tide", "a borrowed coat", "a chess set", "a stubborn donkey cart", "a radio from 1950",
        "an apple tree", "a thunderstorm", "a pair of red shoes", "a kite", "the dawn", "a telescope",
    ],
    "quirk": [
        "wants to learn to swim", "dreams of flying", "cannot sleep", "has lost its name", "only speaks in questions",
        "is older than the town", "refuses to grow up", "wants to be useful again", "collects secrets",
        "has never seen the sea", "is in love with the rain", "tells the truth to everyone", "hides in the attic",
        "is tired of being famous", "sings when nobody listens", "remembers every visitor", "fears the winter",
        "grants very small wishes", "counts the days until summer", "changes colour with the weather",
    ],
    "character": [
        "a retired sailor", "a young beekeeper", "a clockmaker's apprentice", "an astronaut", "a lonely king",
        "a village doctor", "a train conductor", "a blind painter", "a thief with a conscience", "a librarian",
        "a tired superhero", "an old fisherman", "a girl who can talk to birds", "a detective", "a glassblower",
        "a mountain guide", "a street musician", "a shy wizard", "a pastry chef", "a gardener", "a postman",
        "two sisters", "a soldier coming home", "a queen in exile", "a young inventor", "a weather forecaster",
        "a night watchman", "a puppeteer", "a translator", "a widow", "a boy with a wooden leg", "a dragon tamer",
        "a taxi driver", "an ageing actress", "a botanist", "a judge", "a robot gardener", "a refugee",
        "the captain of a spaceship", "a shepherd", "a bookbinder", "a chess master",
    ],
    "deed": [
        "builds a bridge out of books", "loses the only copy of a song", "refuses to leave an empty town",
        "finds a door in the forest", "has to choose between two homes", "teaches stones to dance",
        "writes letters to the future", "sells memories at the market", "crosses the desert on foot",
        "hides a secret from the whole family", "repairs broken hearts", "plants a tree on every birthday",
        "wakes up in another century", "discovers an island that moves", "forgets how to lie",
        "follows a stray dog across the city", "inherits a house with a hundred rooms", "steals the moon",
        "waits for a ship that never comes", "opens a school for ghosts", "learns to listen", "breaks a promise",
    ],
    "creature": [
        "a fox", "an owl", "a hedgehog", "a whale", "a small dragon", "a spider", "a tortoise", "a crow",
        "a house mouse", "a polar bear", "a lazy dog", "a proud rooster", "a frog", "a snail", "a wolf", "a goat",
        "a butterfly", "an elephant", "a penguin", "a firefly", "a squirrel", "a horse", "a jellyfish", "a raven",
        "a parrot", "an ant", "a rabbit", "a sea turtle", "a bear cub", "a goose",
    ],
    "place": [
        "a harbour town", "an abandoned railway station", "the old library", "a village in the mountains",
        "a city under the sea", "a small cafe in Paris", "the edge of the desert", "a space station",
        "a castle in the fog", "a floating market", "a greenhouse on Mars", "a snowed-in hotel", "a quiet suburb",
        "the backstage of an opera", "a monastery", "a forest that never sleeps", "an island without clocks",
        "a hospital at night", "a school for magicians", "the deck of a cargo ship", "a garden in Kyoto",
        "an old cinema", "a swamp", "the ruins of a temple", "a bakery before sunrise", "a vineyard",
        "a town where it always rains", "a cave behind a waterfall", "the roof of a skyscraper", "a ghost town",
    ],
    "time": [
        "midnight", "dawn", "dusk", "the end of summer", "the first day of winter", "noon", "the longest night",
        "New Year's Eve", "harvest time", "low tide", "the early morning", "a Sunday afternoon",
    ],
    "feeling": [
        "courage", "homesickness", "forgiveness", "friendship", "greed", "patience", "hope", "jealousy", "kindness",
        "loneliness", "gratitude", "growing old", "honesty", "fear", "freedom", "trust", "love", "grief", "wonder",
    ],
    "event": [
        "a great storm", "the eclipse", "the flood", "a wedding", "the last day of school", "a power cut",
        "the harvest festival", "an unexpected visit", "the end of the war", "a long journey", "a lost election",
        "the opening of the bridge", "an earthquake", "a birthday nobody remembered", "the great fire",
        "the arrival of the circus", "a train strike", "the discovery of a treasure", "the landing on a new planet",
    ],
}  # fmt: skip


def creative_prompt(random: Random) -> str:
    """One request for something invented."""
    return fill(random.choice(TEMPLATES), SLOTS, random)
