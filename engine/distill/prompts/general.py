# ruff: noqa: E501 (one template a line)
"""Owns everyday requests: questions, explanations, lists, e-mails, summaries and rewriting."""

from __future__ import annotations

from random import Random

from engine.distill.prompts.grammar import fill

TEMPLATES = (
    "What is @topic@?", "Explain @topic@ in simple terms.", "Explain @topic@ to a ten-year-old.",
    "Why is @topic@ important?", "How does @topic@ work?", "What are the advantages and disadvantages of @topic@?",
    "What is the difference between @topic@ and @topic.2@?", "Give me @3..8@ facts about @topic@.",
    "Write a short paragraph about @topic@.", "Write an introduction to an essay about @topic@.",
    "Give a definition of @topic@ and an example.", "Describe the history of @topic@ in a few sentences.",
    "What are common misunderstandings about @topic@?", "Write a quiz with @3..5@ questions about @topic@.",
    "Write an outline for a talk about @topic@.", "How can I learn more about @topic@?",
    "Give me @3..10@ tips for @activity@.", "How do I start with @activity@?", "Make a checklist for @activity@.",
    "Write a plan for a week of @activity@.", "What do I need for @activity@?",
    "What are the most common mistakes in @activity@?", "Write step-by-step instructions for @activity@.",
    "List @4..10@ reasons for @activity@.", "Is @activity@ a good idea for a beginner?",
    "Write an email to @recipient@ about @matter@.", "Write a polite email to @recipient@ to ask about @matter@.",
    "Write a short message to @recipient@ and apologise for @matter@.", "Write a complaint to @recipient@ about @matter@.",
    "Write a reminder to @recipient@ about @matter@.", "Write a formal letter to @recipient@ concerning @matter@.",
    "Draft a reply to @recipient@, who asked about @matter@.", "Write a meeting agenda about @matter@ with @recipient@.",
    "Write a job advertisement for @job@.", "Write a cover letter for a position as @job@.",
    "What does @job@ do all day?", "Write @3..6@ interview questions for @job@.",
    "List the skills @job@ needs.", "Write a short biography of @job@.",
    "Summarize this text in one sentence: @passage@", "Summarize the following in three bullet points: @passage@",
    "Rewrite this text in simpler words: @passage@", "Rewrite this more formally: @passage@",
    "Give a title to this text: @passage@", "List the key facts of this text: @passage@",
    "Correct the grammar: @wrong@", "Fix the mistakes in this sentence and explain them: @wrong@",
    "Turn this into a question and answer it: @passage@", "What is the main idea of this text? @passage@",
    "Tell me about @city@.", "What can one do in @city@ in @2..5@ days?", "What is the best season to visit @city@?",
    "Which is larger, @city@ or @city.2@?", "Write a short travel plan for @city@.", "Name @3..6@ dishes from @city@.",
    "How do I cook @dish@?", "Write a recipe for @dish@.", "What can I serve with @dish@?",
    "Write a shopping list for @dish@ for @2..8@ people.", "Make a vegetarian version of @dish@.",
    "Write a product description for @product@.", "Write a slogan for @product@.",
    "Compare @product@ with @product.2@ in a table.", "Write a review of @product@.",
    "Write a social media post about @product@.", "Write @3..5@ frequently asked questions about @product@.",
    "Translate into French: @short@", "Translate into Spanish: @short@", "Use the word \"@word@\" in three sentences.",
    "What does the word \"@word@\" mean?", "Give synonyms and antonyms of \"@word@\".",
    "Who was @figure@?", "What is @figure@ known for?", "Write a timeline of the life of @figure@.",
    "Hello! Can you help me with @activity@?", "I feel @mood@ today. What can I do?",
    "Name @4..10@ animals that live in @habitat@.", "What lives in @habitat@?", "Describe @habitat@ in two paragraphs.",
)  # fmt: skip

SLOTS = {
    "topic": [
        "photosynthesis", "inflation", "gravity", "the water cycle", "machine learning", "democracy", "a black hole",
        "the immune system", "plate tectonics", "the stock market", "renewable energy", "evolution", "recycling",
        "the internet", "blockchain", "a vaccine", "supply and demand", "the French Revolution", "electricity",
        "a neural network", "climate change", "the ozone layer", "cloud computing", "an algorithm", "DNA",
        "the greenhouse effect", "public transport", "biodiversity", "encryption", "a database", "nuclear energy",
        "the Renaissance", "minimalism", "a balanced diet", "time management", "open source software", "tides",
        "the solar system", "artificial intelligence", "the printing press", "insulin", "version control", "jazz",
        "the Roman Empire", "magnetism", "an operating system", "fermentation", "globalization", "sleep",
    ],
    "activity": [
        "running a marathon", "learning a language", "growing tomatoes", "saving money", "moving to a new city",
        "writing a novel", "learning to code", "baking bread", "planning a wedding", "public speaking",
        "keeping a diary", "training a puppy", "playing the guitar", "meditation", "hiking in the mountains",
        "preparing for an exam", "organising a birthday party", "starting a small business", "reading more books",
        "fixing a bicycle", "painting a room", "working from home", "photography", "giving feedback", "swimming",
        "cleaning the kitchen", "building a website", "job interviews", "camping", "composting",
    ],
    "recipient": ["my manager", "a customer", "my landlord", "a professor", "the support team", "a colleague",
                  "my neighbour", "the bank", "a supplier", "the city council", "a new employee", "the school",
                  "the whole team", "a hotel", "my insurance company", "an old friend"],
    "matter": ["a late delivery", "a broken heating", "the project deadline", "a salary increase", "a lost parcel",
               "the holiday schedule", "a missed meeting", "a wrong invoice", "the new software", "a reservation",
               "a noisy party", "the annual report", "a refund", "an internship", "a change of address",
               "the budget for next year", "a cancelled flight", "a data backup", "a parking space"],
    "job": ["a nurse", "a data analyst", "a carpenter", "a software engineer", "an architect", "a chef",
            "a project manager", "a pilot", "a graphic designer", "a teacher", "an electrician", "a journalist",
            "a marine biologist", "an accountant", "a librarian", "a firefighter"],
    "passage": [
        "The town council decided on Tuesday to close the main bridge for repairs. Work will take about eight months, and buses will use the northern route. Shop owners fear that fewer customers will come.",
        "Honeybees communicate the position of flowers with a dance. The angle of the dance shows the direction relative to the sun, and its length shows the distance.",
        "The company reported higher sales in the second quarter, but profits fell because energy and transport became more expensive. It plans to open three new stores next year.",
        "Coffee was first grown in Ethiopia and came to Europe in the seventeenth century. Today it is one of the most traded goods in the world, and millions of small farmers depend on it.",
        "Researchers tested a new battery that charges in ten minutes. It keeps most of its capacity after two thousand cycles, but it is still too expensive for cars.",
        "The museum has bought a painting that was thought to be lost for a century. It was found in the attic of a farmhouse and will be shown to the public in spring.",
        "Glaciers store most of the fresh water on Earth. When they melt faster than snow can replace them, sea levels rise and rivers in dry regions lose their source.",
        "Our team moved the website to new servers last night. Some users could not log in for about twenty minutes. No data was lost, and all services are running again.",
    ],
    "wrong": ["She don't like apples and neither he does.", "Yesterday I go to the market and buyed a bread.",
              "There is many reason why people is moving to the city.", "He have been working here since three years.",
              "Me and my brother was playing in garden when it start raining.", "The informations are not correct.",
              "I am looking forward to meet you in the next week.", "Their going to there house over they're."],
    "city": ["Rome", "Istanbul", "Kyoto", "Prague", "Mexico City", "Cape Town", "Vienna", "Seoul", "Lima", "Dublin",
             "Marrakesh", "Helsinki", "New York", "Mumbai", "Athens", "Buenos Aires", "Hanoi", "Toronto"],
    "dish": ["lentil soup", "pancakes", "mushroom risotto", "chili", "an apple pie", "fried rice", "ratatouille",
             "tacos", "a chocolate cake", "minestrone", "potato salad", "pad thai", "hummus", "banana bread"],
    "product": ["a solar lamp", "wireless headphones", "a water bottle", "an electric bike", "a coffee grinder",
                "a smart watch", "a standing desk", "a backpack", "a raincoat", "a garden chair", "a reading app",
                "a board game", "a vacuum robot", "a wool blanket"],
    "short": ["Where is the nearest pharmacy?", "I would like a table for two.", "The train is late again.",
              "My sister lives near the sea.", "How much does this cost?", "We will meet tomorrow at the station.",
              "It was a long and beautiful summer.", "Please close the window."],
    "word": ["ephemeral", "resilient", "ambiguous", "serendipity", "pragmatic", "meticulous", "candid", "frugal",
             "obsolete", "tangible", "lucid", "vivid", "diligent", "reluctant"],
    "figure": ["Marie Curie", "Leonardo da Vinci", "Ada Lovelace", "Charles Darwin", "Cleopatra", "Isaac Newton",
               "Frida Kahlo", "Nelson Mandela", "Alan Turing", "Mozart", "Galileo Galilei", "Rosa Parks"],
    "mood": ["tired", "stressed", "bored", "lonely", "nervous", "happy", "unmotivated", "overwhelmed"],
    "habitat": ["the rainforest", "the deep sea", "the Arctic", "the savanna", "a coral reef", "the desert",
                "a city park", "a mountain lake", "a mangrove forest"],
}  # fmt: skip


def general_prompt(random: Random) -> str:
    """One everyday request."""
    return fill(random.choice(TEMPLATES), SLOTS, random)
