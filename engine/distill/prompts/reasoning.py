# ruff: noqa: E501 (one template a line)
"""Owns the word problems and small logic puzzles that ask for steps."""

from __future__ import annotations

from random import Random

from engine.distill.prompts.grammar import fill

TEMPLATES = (
    "@name@ buys @3..19@ @goods@ for @2..18@ @money@ each and pays with a @100..500@ note. How much change does @name@ get?",
    "@name@ has @20..90@ @goods@ and gives @3..9@ to each of @2..6@ friends. How many are left?",
    "A @shop@ sells @12..60@ @goods@ on Monday, twice as many on Tuesday and @5..30@ fewer on Wednesday than on Tuesday. How many does it sell in all?",
    "A @vehicle@ travels @80..600@ km in @2..9@ hours. What is its average speed?",
    "A @vehicle@ leaves at @6..11@:@10..55@ and needs @2..7@ hours and @5..55@ minutes. When does it arrive?",
    "A @vehicle@ drives at @40..130@ km per hour. How long does it need for @90..700@ km?",
    "Two @vehicle@s start at the same time from towns @120..600@ km apart and move towards each other at @40..70@ and @50..90@ km per hour. When do they meet?",
    "A @vehicle@ uses @4..12@ litres of fuel per 100 km. How much fuel does it need for @150..900@ km, and what does that cost at @1.20..2.10@ @money@ per litre?",
    "@name@ is @3..12@ years older than @name.2@. In @4..10@ years they will be @50..90@ years old together. How old are they now?",
    "@name@ is @2..4@ times as old as @name.2@, and the difference of their ages is @12..40@ years. How old is each of them?",
    "The sum of two numbers is @30..140@ and their difference is @4..24@. What are the numbers?",
    "The price of a @item@ is @40..900@ @money@. It is reduced by @5..40@ percent. What does it cost now?",
    "A @item@ costs @50..400@ @money@ after a discount of @10..50@ percent. What was the original price?",
    "@name@ earns @12..38@ @money@ per hour and works @4..9@ hours a day, @3..6@ days a week. How much does @name@ earn in @2..8@ weeks?",
    "@name@ saves @15..80@ @money@ every month. How long does it take to save for a @item@ that costs @200..1500@ @money@?",
    "A bank pays @1..7@ percent interest a year. How much do @200..9000@ @money@ grow to in @2..4@ years with compound interest?",
    "A rectangle is @3..28@ cm long and @2..19@ cm wide. What are its perimeter and its area?",
    "A circular @round_thing@ has a radius of @2..25@ metres. What are its circumference and its area?",
    "A triangle has a base of @4..30@ cm and a height of @3..20@ cm. What is its area?",
    "A box is @2..12@ cm long, @2..9@ cm wide and @3..15@ cm high. What is its volume?",
    "A garden of @8..30@ by @6..20@ metres is surrounded by a path that is @1..3@ metres wide. What is the area of the path?",
    "A pool holds @2000..60000@ litres. A hose fills @15..90@ litres per minute. How many hours does it take to fill it?",
    "A tap drips @2..9@ ml of water every @3..20@ seconds. How many litres does it lose in a day?",
    "@name@ can paint a @paintable@ in @2..6@ hours, @name.2@ needs @4..12@ hours. How long do they need together?",
    "@3..9@ workers build a @paintable@ in @4..20@ days. How many days do @2..15@ workers need?",
    "A recipe for @2..6@ people needs @150..600@ g of flour and @2..5@ eggs. How much is needed for @7..20@ people?",
    "A bag contains @3..12@ @colour@ and @2..9@ @colour.2@ balls. What is the probability of drawing a @colour@ one?",
    "Two dice are thrown. What is the probability that the sum is @4..11@?",
    "A coin is thrown @3..6@ times. What is the probability of getting heads exactly @1..3@ times?",
    "How many ways are there to choose @2..4@ @people@ out of @5..12@?",
    "In how many ways can @3..6@ @goods@ be arranged in a row?",
    "The average of @3..6@ numbers is @8..40@. A further number, @10..90@, is added. What is the new average?",
    "@name@ got @55..99@, @50..98@ and @45..97@ points in three tests. How many points are needed in the fourth test for an average of @70..90@?",
    "Of @80..900@ @people@, @10..60@ percent take the bus and a quarter of the rest walk. How many walk?",
    "A class has @18..34@ @people@. @8..15@ play football, @6..12@ play chess and @2..5@ play both. How many play neither?",
    "@name@ reads @10..60@ pages a day. A book has @180..720@ pages. @name.2@ reads @5..25@ pages a day more. How many days earlier does @name.2@ finish?",
    "A farmer has @people_animals@ and @people_animals.2@, @20..60@ heads and @60..180@ legs in all. How many of each are there if one kind has two legs and the other four?",
    "The ratio of @goods@ to @goods.2@ in a @shop@ is @2..7@ to @2..9@. There are @20..240@ items in all. How many of each are there?",
    "Three friends share @60..900@ @money@ in the ratio @1..4@:@2..5@:@1..6@. How much does each get?",
    "A snail climbs @3..6@ metres up a wall every day and slips back @1..2@ metres every night. The wall is @10..25@ metres high. On which day does it reach the top?",
    "A number is doubled, then @3..20@ is added, and the result is @25..99@. What is the number?",
    "Solve @2..9@x + @1..30@ = @31..120@ for x.",
    "Solve the equations x + y = @10..50@ and x - y = @1..9@.",
    "What is @12..98@ times @11..79@?",
    "What is @fraction@ of @120..960@?",
    "What is @5..95@ percent of @40..1200@?",
    "Convert @2..60@ kilometres per hour to metres per second.",
    "A @shop@ buys @goods@ for @2..9@ @money@ and sells them for @10..20@ @money@. It has fixed costs of @200..2000@ @money@ a month. How many must it sell to break even?",
    "No @group@ are @group.2@. All @group.3@ are @group@. Can a @group.3@ member be one of the @group.2@?",
    "If it @weather@, @name@ stays at home. @name@ is not at home. What follows?",
    "If @name@ goes to the party, @name.2@ goes too. @name.2@ goes only if @name.3@ stays away. @name.3@ goes. Who is at the party?",
    "@name@ is taller than @name.2@, @name.3@ is shorter than @name.2@. Who is the shortest?",
    "@name@, @name.2@ and @name.3@ own a @item@, a @item.2@ and a @item.3@. @name@ does not own the @item@, @name.2@ owns the @item.3@. Who owns what?",
    "One of three boxes holds a prize. The first says \"it is here\", the second says \"it is not here\", the third says \"it is not in the first\". Only one is true. Where is the prize?",
    "The day after tomorrow is @weekday@. What day was it @2..6@ days ago?",
    "Today is @weekday@. Which day of the week is it in @20..200@ days?",
    "What comes next in the sequence @2..9@, @10..18@, @19..27@, @28..40@? Look at the differences.",
    "A meeting starts at @8..15@:@10..50@ and has four parts of @10..45@ minutes with breaks of @5..15@ minutes between them. When does it end?",
    "@name@ walks @2..9@ km north, @1..8@ km east and @2..9@ km south. How far away from the start is @name@?",
    "A phone plan costs @8..25@ @money@ a month plus @0.05..0.30@ @money@ per minute. Another costs @26..45@ @money@ flat. From how many minutes on is the flat plan cheaper?",
    "@name@ mixes @1..6@ litres of @10..30@ percent juice with @1..6@ litres of @40..80@ percent juice. What is the share of juice in the mixture?",
    "A ladder of @4..13@ metres leans against a wall, its foot is @1..3@ metres away from it. How high does it reach?",
    "A car loses @8..25@ percent of its value every year. It cost @9000..45000@ @money@. What is it worth after @2..4@ years?",
    "A population of @200..5000@ @people_animals@ grows by @2..20@ percent a year. How large is it after @2..3@ years?",
)  # fmt: skip

ENDINGS = (
    "Think step by step.", "Show every step.", "Reason step by step.", "Explain each step.", "Show your work.",
    "Work it out step by step.", "Show the steps.", "Step by step, please.", "Show the reasoning.",
    "Explain step by step.", "Explain your reasoning.", "Let's think step by step.", "Solve it step by step.",
    "Give the steps and then the answer.", "Explain how you get there.", "",
)  # fmt: skip

SLOTS = {
    "name": [
        "Anna", "Omar", "Julia", "Pedro", "Mei", "Lukas", "Fatima", "David", "Sofia", "Ivan", "Grace", "Tomas",
        "Priya", "Noah", "Elena", "Samuel", "Ingrid", "Carlos", "Hana", "Peter", "Amina", "Oliver", "Rosa", "Jonas",
        "Lily", "Mark", "Zoe", "Karim", "Emma", "Victor", "Sarah", "Tim", "Laura", "Max", "Alice", "Bob",
    ],
    "goods": ["apples", "pencils", "books", "tickets", "oranges", "stickers", "eggs", "notebooks", "candles",
              "cookies", "roses", "marbles", "stamps", "bottles", "muffins", "toys", "lamps", "cups", "cards"],
    "money": ["dollars", "euros", "pounds", "francs"],
    "shop": ["bakery", "bookshop", "market stall", "grocery store", "toy shop", "kiosk", "warehouse", "flower shop",
             "farm", "factory", "supermarket", "library"],
    "fraction": ["a third", "two thirds", "a quarter", "half", "three fifths", "a fifth", "five sixths", "a tenth",
                 "three eighths"],
    "vehicle": ["car", "train", "bus", "cyclist", "truck", "boat", "plane", "motorbike", "ferry"],
    "item": ["bicycle", "laptop", "coat", "watch", "camera", "desk", "guitar", "phone", "tent", "sofa", "printer",
             "jacket", "drone", "mirror"],
    "round_thing": ["pond", "table", "field", "fountain", "stage", "carpet", "flower bed"],
    "paintable": ["fence", "wall", "room", "shed", "boat", "house", "road"],
    "colour": ["red", "blue", "green", "yellow", "black", "white", "purple", "orange"],
    "people": ["students", "employees", "players", "children", "guests", "members", "singers", "visitors"],
    "people_animals": ["chickens", "goats", "ducks", "cows", "sheep", "geese", "rabbits", "pigs", "horses"],
    "group": ["cats", "painters", "birds", "roses", "doctors", "swimmers", "teachers", "bridges", "poets", "robots",
              "musicians", "vegetables", "runners", "tall people", "red things", "drivers"],
    "weather": ["rains", "snows", "is windy", "is hot", "is foggy", "freezes"],
    "weekday": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
}  # fmt: skip


def reasoning_prompt(random: Random) -> str:
    """One problem to be solved in steps."""
    return f"{fill(random.choice(TEMPLATES), SLOTS, random)} {random.choice(ENDINGS)}".strip()
